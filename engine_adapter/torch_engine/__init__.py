"""The embedded engine: a small, real serving engine on torch and transformers. Importing it loads no torch.

serving    serve.py the command and its options · server.py the routes, and the engine's process
           completions.py chats, completions and embeddings, from a request to its answer
           protocol.py request bodies, and errors · answers.py tokens to text, and what clients get
           tool_calls.py, grammar.py calls and structures in answers, and how to keep to them
           service.py an engine with its tokenizer, p-tuning tables and metrics, its bridge to the event loop
           event_publisher.py KV events over ZMQ
engine     engine.py the step loop, in its own thread, and one step · requests.py what goes in and out
           scheduler.py what may run, and what next · sampling.py the next tokens, random ones
model      model.py loads it and checks its answers, one forward pass
           attention.py where KV lies, attention over it
KV cache   kv_cache.py sequences and blocks, flush, offload, restore and pin
           kv_tree.py the prefix tree over two tiers, its parts, retention, and its events
adapter.py drives such an engine from kvpin, reads its streams
"""
