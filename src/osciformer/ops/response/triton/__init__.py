"""The scan of the response on CUDA; imports nothing, so that it works without Triton."""
