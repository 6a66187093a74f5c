"""A small, real LLM engine: continuous batching, a paged KV cache, OpenAI's HTTP interface."""

import os

# OpenMP reads these once, when torch brings it up. Left alone, its threads spin for milliseconds
# at the end of every operator; on cores shared with anyone, that made steps of 30 ms last a
# second. Sleeping at once costs a third on idle cores. So they spin for some 50 µs: long enough
# for the next operator, too short to matter.
if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
    os.environ |= {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "3000"}
