"""Published systems, a short file each: which pieces, which settings, the paper. Imported as `spec_jax.configs`."""
