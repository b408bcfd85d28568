"""Products whose operands carry scales: eight and four bits as frameworks run them, quantisation and product."""
