"""The embedded engine: a small, real serving engine on torch and transformers. Importing it loads no torch.

serving    serve.py the command · options.py its options · process.py its process
           server.py, kv_routes.py, completions.py, embeddings.py the routes · web.py what they share
           protocol.py, structure.py request bodies · prepare.py what they ask of the engine
           detokenize.py, tool_calls.py tokens to text and calls · grammar.py keeps to a structure
           answers.py what clients get
           service.py an engine with its tokenizer and tables · generation.py its bridge to the event loop
           prompt_tables.py p-tuning · event_publisher.py KV events over ZMQ · metrics.py
engine     engine.py the step loop, in its own thread · requests.py what goes in and out
           scheduler.py what may run, and what next · compute.py one step
           sampling.py the next tokens, random ones
model      model.py loads it and checks its answers
           runner.py one forward pass · attention.py attention over paged KV · storage.py where KV lies
           memory.py what memory there is
KV cache   kv_cache.py sequences and blocks · kv_tree.py the prefix tree over two tiers, and its events
           kv_node.py its parts · kv_kept.py retention · kv_admin.py flush, offload, restore, pin
adapter.py drives such an engine from kvpin, reads its streams · routes.py its routes beside `/v1`
"""
