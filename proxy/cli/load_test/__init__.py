"""A small load test of an OpenAI-compatible server, in the words of vLLM's benchmark.

    workload → prompts, arrivals → send → a sample of each request → figures

workload.py  prompts that share prefixes, and when each is sent
sender.py    sends them and times the streams
figures.py   throughput, TTFT, TPOT, ITL, E2EL, cached tokens
"""
