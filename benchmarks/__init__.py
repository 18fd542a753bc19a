"""One command per question: ``python -m benchmarks.<name>`` from the root of the repository.

=================  =====================================================================  ========
 command            question                                                               GPU
=================  =====================================================================  ========
 ``ceilings``       what can this machine do: gemms, bandwidth, attention, a launch?       needed
 ``llama_block``    how fast is a Llama 8B or 70B block, and what does it save?            needed
 ``kernel_times``   where does the time of a block go, kernel by kernel against floors?    needed
 ``ablations``      what is each choice worth: graphs, merging, where scales go, ...?      needed
 ``linear_sweep``   how fast is one linear layer, forward and backward, by M, K and N?     needed
 ``kernels``        how near does each cast kernel come to the copy bandwidth?             needed
 ``inference``      how fast are a prompt and steps of decoding?                           needed
 ``experts``        how fast are the experts of a mixture, as grouped matmuls?             needed
 ``train_1b``       does 1 B parameters learn in float8 as in bf16, and how fast?          needed
 ``compile_time``   what do the passes cost, by size of the graph and of a compile?        if any
 ``gpu``            all of the above and the GPU tests, within ten minutes                 needed
 ``calibrate``      what do measurements make of the cost model's constants?               not used
 ``headline``       the README's table from results                                        not used
 ``report``         tables (Markdown) and pictures (PNG) from a result's JSON              not used
 ``traffic``        what would Inductor run on an H100: kernels, bytes, bytes saved?       not used
 ``comm``           what would travel between ranks?                                       not used
=================  =====================================================================  ========

Those that need a GPU, except ``gpu``, have ``--cpu-smoke``: tiny shapes on a CPU, to see that they run.
Results are ``results/<date>-<device>-<name>.json``, with ``-<commit>`` behind the name where another result of that day has the
name already, stamped with the machine and the versions they were measured with. Numbers that were not measured do not go there.
"""
