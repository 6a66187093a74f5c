"""A small, real LLM engine: continuous batching, a paged KV cache, OpenAI's HTTP interface."""

import os

# Read once, when torch brings up OpenMP. Its threads would else spin at the end of every
# operator; on cores shared with anyone, that makes steps tens of times slower (60 ms became 1 s
# on two cores), while sleeping costs a quarter on idle ones.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
