"""The checks, each written once with its threshold beside it. They decide from values that an adapter hands them."""
