"""`kvpin doctor URL`.

probe.py   sends an engine a few requests and compares its answers with predictions
doctor.py  the report: what the engine is, what is exact, which flag improves it
"""
