"""Steps of whole models and jobs against measured ones, also on other boards than those recorded."""
