"""An engine seen from outside: nothing is put into it.

HTTP is read from the system calls of its sockets, steps are told by a function
that it enters once a step, and what it says of itself is read from its /metrics.
What these tell is inferred, and labelled so.
"""
