"""From a request's text to token ids, as engines do it.

chat.py            render + tokenise as transformers does    chat_messages.py   messages before the template
content_format.py  string or list content                    encoders.py        the fastest exact encoder
gguf_metadata.py, gguf_tokenizer.py                          tokenizers inside GGUF files
extra_ids.py       identity of embeddings                    media.py           identity of images
prefixes.py        how far two token runs agree
"""
