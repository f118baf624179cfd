"""A make-believe CUDA under the real torch: the trainer's GPU path, run without a GPU.

    csrc/         libcudart, libcuda, libnccl and libnvidia-ml: what torch and the trainer call
    build.py      builds them once (5 s); the variables that put them under a process
    operators.py  computes each operator on CUDA tensors with the CPU's kernel, on the same memory
    ranks.py      the trainer on simulated GPUs, ranks and nodes, for tests
    stories.py    what happens to a rank: an ECC error, NCCL that fails
    __main__.py   `python -m tests.gpu_sim -m train --dummy ...`, by hand

torch's own C++ runs for real: caching allocators, streams, events, pinned memory, autograd's
threads, DDP's reducer, ProcessGroupNCCL with its watchdog, autocast, the gradient scaler. Replaced
are kernels, cuDNN, cuBLAS and NCCL's transport. So it shows which device, memory, stream and rank
is used, what is waited for, and how errors travel. It knows no timing, no --compile, no CUDA graphs
and no real NCCL, and 16-bit convolutions are computed in fp32.

    CUDASIM_DEVICES, CUDASIM_NODE           GPUs of this node (1), and its name
    CUDASIM_MEMORY_MB, CUDASIM_CAPABILITY   of each (81920, 80); the limit of memory is real
    CUDASIM_NAME, CUDASIM_DRIVER            of each, and the driver's version (13020)
    CUDASIM_DMA_US, NCCLSIM_US              copies of pinned memory (3000) and collectives (0) end
                                            so many microseconds later: a missing wait shows
    CUDASIM_TO_DEVICE_US                    the same for copies to the device alone
    CUDASIM_MODE=shape, CUDASIM_QUEUE=N     computes nothing; at most N launches are queued
"""
