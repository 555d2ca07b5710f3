"""The memories as pure functions of tensors: no modules, no training code."""
