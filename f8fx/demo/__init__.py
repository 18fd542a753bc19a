"""The demo: a Llama-style decoder trained on real text, in bf16 and in float8, side by side.

====================  =================================================================
:mod:`~.model`        the decoder, plain PyTorch; tests and benchmarks use it too
:mod:`~.data`         the text: the Python standard library's own sources, as bytes
:mod:`~.train`        the same training run twice, once per backend; ``main`` of ``f8fx demo``
:mod:`~.distributed`  the same on several ranks, under FSDP2
:mod:`~.show`         the table, the picture and the JSON at the end
====================  =================================================================
"""
