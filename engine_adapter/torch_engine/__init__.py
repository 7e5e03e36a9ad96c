"""The embedded engine: a small, real serving engine on torch and transformers. Importing it loads no torch.

serving    serve.py the command and its options · process.py its process
           server.py, completions.py the routes, embeddings among them · web.py what they share
           protocol.py request bodies · prepare.py what they ask of the engine
           detokenize.py, tool_calls.py tokens to text and calls
           grammar.py structures of answers, and how to keep to them
           answers.py what clients get
           service.py an engine with its tokenizer and tables, its bridge to the event loop
           prompt_tables.py p-tuning · event_publisher.py KV events over ZMQ · metrics.py
engine     engine.py the step loop, in its own thread · requests.py what goes in and out
           scheduler.py what may run, and what next; one step
           sampling.py the next tokens, random ones
model      model.py loads it and checks its answers
           runner.py one forward pass · attention.py where KV lies, attention over it
KV cache   kv_cache.py sequences and blocks · kv_tree.py the prefix tree over two tiers, and its events
           kv_node.py its parts, retention
           kv_cache.py has flush, offload, restore and pin, too
adapter.py drives such an engine from kvpin, reads its streams
"""
