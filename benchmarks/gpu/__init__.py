"""A campaign on a machine with one GPU: everything that is worth measuring, in the order of its worth.

``campaign`` drives stages, each in a process of its own with a time limit of its own; ``stages`` lists them,
and each of the other modules holds the stages of one subject. What a stage learns is in ``results.jsonl`` at
once.
"""
