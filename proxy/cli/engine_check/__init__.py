"""`kvpin doctor URL`.

examine.py  the report: what the engine is, which flag improves it
probe.py    sends two requests; compares cached tokens with the prediction
display.py  the report as text
"""
