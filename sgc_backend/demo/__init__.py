"""A small language model and its serving loop: what a user's engine looks like, for the demo and the tests.

model.py is the decoder, ops.py its two custom ops (kernels.py: their Triton kernels), engine.py the serving loop with
requests.py and allocator.py, serve.py the same loop served from recordings, speculative.py both with a draft model,
findings.py what a demo checks and measures, prompts.py something to ask, and train.py makes weights.pt.
"""
