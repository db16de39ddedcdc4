"""Operations with their kernels; each has an XLA reference that is the oracle. Imports nothing of spec_jax."""
