"""Virtual devices to compile for: to be set up before jax is imported."""

XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",  # next to nothing is run
    "--xla_llvm_disable_expensive_passes": "true",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",  # the fuzzer runs programs
}


def xla_flags(given: str) -> str:
    """`XLA_FLAGS` for eight CPU devices, what the user has set there taking precedence."""
    added = [f"{name}={value}" for name, value in XLA_FLAGS.items() if name not in given]
    return " ".join([given, *added]).strip()
