"""One command per question: ``python -m benchmarks.<name>`` from the root of the repository.

=================  =====================================================================  ========
 command            question                                                               GPU
=================  =====================================================================  ========
 ``linear_sweep``   how fast is one linear layer, forward and backward, by M, K and N?     needed
 ``llama_block``    how fast is a Llama 8B or 70B block, and what does it save?            needed
 ``kernels``        how near does each cast kernel come to the copy bandwidth?             needed
 ``traffic``        what would Inductor run on an H100: kernels, bytes, bytes saved?       not used
 ``compile_time``   what do the passes cost, by size of the graph and of a compile?        not used
 ``gpu``            all of the above and the GPU tests, within ten minutes                 needed
 ``report``         tables (Markdown) and pictures (PNG) from a result's JSON              not used
=================  =====================================================================  ========

Results are ``results/<date>-<device>-<name>.json``, stamped with the machine and the versions they
were measured with. Numbers that were not measured do not go there.
"""
