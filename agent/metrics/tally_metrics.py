"""What the samples of sources/tallies.py may be called: of experts and drafts."""

from __future__ import annotations

from dsagent.agent.metrics.metric import Metric

EXPERT_LOAD = Metric(
    "dsagent.moe.expert_load.max_ratio",
    "gauge",
    "1",
    "Tokens routed to a layer's busiest expert, over the mean of its experts; last minute.",
    ("layer",),
)
EXPERT_LOAD_WORST = Metric(
    "dsagent.moe.expert_load.worst_ratio",
    "gauge",
    "1",
    "The same, of the layer where it is largest.",
)
EXPERTS_DEAD = Metric(
    "dsagent.moe.experts.dead",
    "gauge",
    "{expert}",
    "Experts of a layer that got no token in the last minute, where 20 each would be fair.",
    ("layer",),
)
DRAFT_ACCEPTANCE = Metric(
    "dsagent.spec_decode.acceptance_ratio",
    "gauge",
    "1",
    "Drafts whose token at this position was accepted; last minute.",
    ("position",),
)
DRAFT_LENGTH = Metric(
    "dsagent.spec_decode.acceptance_length",
    "gauge",
    "{token}",
    "Tokens a draft yields: 1 + accepted tokens / drafts; last minute.",
)

TALLY_METRICS = (EXPERT_LOAD, EXPERT_LOAD_WORST, EXPERTS_DEAD, DRAFT_ACCEPTANCE, DRAFT_LENGTH)
