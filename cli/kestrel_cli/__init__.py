"""The command line of kestrel-cuda. Everything it knows of models and devices it asks of the package kestrel_cuda."""
