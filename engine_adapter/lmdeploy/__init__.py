"""LMDeploy's `api_server` as an engine.

adapter.py         the adapter                   template_input.py  chats as its template gets them
"""
