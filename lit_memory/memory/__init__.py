"""The memories as maths on tensors: no modules, no training code; every function stands alone."""
