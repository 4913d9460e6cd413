"""Virtual devices to compile for: to be set up before jax is imported."""

XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",  # nothing is run
    "--xla_llvm_disable_expensive_passes": "true",
}


def xla_flags(given: str) -> str:
    """`XLA_FLAGS` for eight CPU devices, what the user has set there taking precedence."""
    added = [f"{name}={value}" for name, value in XLA_FLAGS.items() if name not in given]
    return " ".join([given, *added]).strip()
