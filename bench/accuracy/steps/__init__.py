"""Steps of whole models and jobs against measured ones."""
