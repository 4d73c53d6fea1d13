def masked_mean(values, mask, dim=None, global_normalization_factor=None):
    count = mask.sum(dim=dim) if global_normalization_factor is None else global_normalization_factor
    return (values * mask).sum(dim=dim) / (count + 1e-8)
