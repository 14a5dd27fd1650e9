"""The real engine: AsyncLLM in this process. Importing this package imports no vLLM; starting the engine does."""
