"""RATIONAL where lanes are threads: transactions, banks, occupancy, issue, and the stages made of them."""
