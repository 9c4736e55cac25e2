"""A pipeline of ranks as a model: what each rank runs and when, what of it is idle, exposed and held. Nothing runs."""
