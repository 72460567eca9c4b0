"""Several processes that train one model: which of them this is, what they say and send to each other."""
