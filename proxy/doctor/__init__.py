"""`kvpin doctor URL`.

probe.py   sends an engine two requests and compares the cached tokens it reports with the prediction
doctor.py  the report: what the engine is, what kvpin knows exactly, which flag improves it
"""
