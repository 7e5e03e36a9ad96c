"""Several workers answer as one: one of them speaks for all.

siblings.py    the other workers, and who speaks for all
hand_over.py   what a worker hands over to that one: counts, events
together.py    passes operators' requests on to it; it asks others where they must do or know something
"""
