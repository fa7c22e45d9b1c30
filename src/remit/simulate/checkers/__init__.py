"""Did the run keep its promises? Judged from rows, answers and the runner's record; nothing of the law, nor of commitment.

A wrong law must not acquit itself, so these pages have their own arithmetic of amounts, their own copy of the lifecycle
(DESIGN section 4) and their own reading of placement. What a component says of itself counts for nothing here.
"""
