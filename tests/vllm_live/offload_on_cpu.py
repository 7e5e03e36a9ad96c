"""A vLLM loads this file: its offloading connector on a machine without a GPU.

vLLM's own worker copies blocks by CUDA. This one copies them by torch. Nothing else differs: lookups, chunks,
evictions and events are vLLM's own.
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class OnCpu(CPUOffloadingSpec):
    """vLLM's offloading to host memory, of a cache that lies in host memory itself."""

    def get_worker(self, kv_caches):
        if self._worker is None:
            self._worker = _Copier(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker


class _Copier(OffloadingWorker):
    def __init__(self, kv_caches, blocks_per_chunk, chunks):
        pages = [(each.tensor, each.page_size_bytes) for each in kv_caches.tensors]
        self._own = [tensor.view(torch.int8).view((-1, size)) for tensor, size in pages]
        self._host = [torch.zeros((chunks * blocks_per_chunk, size), dtype=torch.int8) for _, size in pages]
        self._blocks_per_chunk = blocks_per_chunk
        self._finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, self._own, self._host, src_spec, dst_spec)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, self._host, self._own, dst_spec, src_spec)

    def _copy(self, job_id, sources, targets, own_spec, host_spec):
        """The blocks of a request that lie in chunks; the first may begin within its chunk."""
        (first,), own = own_spec.block_indices, own_spec.block_ids.tolist()
        each = self._blocks_per_chunk
        host = [chunk * each + at for chunk in host_spec.block_ids.tolist() for at in range(each)]
        host = host[first % each :][: len(own)]
        source, target = (own, host) if sources is self._own else (host, own)
        for here, there in zip(sources, targets, strict=True):
            there[target] = here[source]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        """Each copy ends before it returns."""
