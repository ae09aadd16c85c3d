"""The bundled tasks; each is an `areal.contracts.environment.Environment` with its Options class beside it."""
