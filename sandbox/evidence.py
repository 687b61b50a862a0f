"""What is real and what stands in, in the sandbox; shown in the summary beside each role."""

PARTS = {
    "preflight": "real host; GPU, driver and its library stand in (a T4G's facts)",
    "swapfile": "real",
    "cuda_toolkit_sbsa": "real apt and nvcc 13.2; the repository stands in",
    "rust": "real rustup and toolchain; the distribution server stands in",
    "vllm_source_build": "real sdist, build and wheels; torch is the CPU build, no CUDA kernels",
    "triton_patch": "real file, real Triton compiler for 7.5; no launch on a card",
    "secrets_fetch": "real boto3 and systemd; Secrets Manager and metadata stand in",
    "vllm_service": "real vLLM on the CPU, a tiny Gemma 4 trained here",
}
