"""NIXL for an SGLang on a CPU, which registers its memory as that of a GPU: here it is DRAM."""
