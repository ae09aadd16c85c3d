"""The models that AReaL can make or convert by itself, without a model hub."""
