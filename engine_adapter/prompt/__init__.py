"""Makes token ids of a request's text, as engines do.

chat.py               render + tokenise as transformers does
templates.py          renders templates
tokenizer_process.py  loads a tokenizer in a second process   described.py      one from its description
content_format.py     string or list content                  encoders.py       the fastest exact encoder
gguf_tokenizer.py     tokenizers inside GGUF files, with llama.cpp's letters
extra_ids.py          identity of embeddings                  media.py          identity of images, embeddings
sandbox.py            the sandbox templates run in            cuts.py               where a text can be cut
torch_file.py         reads a saved tensor
message_shapes.py     messages that a template refuses or leaves out
forms.py              prompts that all engines make alike
template_input.py     what an engine gives its template
lengths.py            refuses texts that cannot fit, before they are encoded whole
"""
