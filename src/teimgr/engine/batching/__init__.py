"""From jobs to packed batches: the queue by lane, tenant and length, and the batch itself."""
