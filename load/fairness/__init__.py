"""Whether one tenant can hurt another, measured on a real worker (`headrace bench fairness`).

plan        who publishes what and when, pure
measures    ratios, shares, intervals, verdicts, pure
client      publishes jobs and notes what comes back, and when
offer       the flood, a process of its own
stage       a stack, one worker after the other on topics of its own, and its gauges
flood       first-token delays of the neighbours, beside a tenant that offers a hundred times as much
shares      who gets how much of the engine when everybody wants more
cost        what the fair scheduler costs beside plain FIFO
bench       all of it, and the verdict
table       the report for people
"""
