"""Two recordings of one program compared: which operators became slower, which are new or gone, down to kernels."""
