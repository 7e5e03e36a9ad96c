"""Makes token ids of a request's text, as engines do.

chat.py               render + tokenise as transformers does
templates.py          renders templates
template_trials.py    string or list content; messages that a template refuses or leaves out
template_input.py     what an engine gives its template
sandbox.py            the sandbox templates run in
encoders.py           the fastest exact encoder; where a text can be cut; refuses texts that cannot fit,
                      before they are encoded whole
tokenizer_process.py  loads a tokenizer in a second process   described.py      one from its description
gguf_tokenizer.py     tokenizers inside GGUF files, with llama.cpp's letters
extra_ids.py          identity of embeddings and images
forms.py              prompts that all engines make alike
"""
