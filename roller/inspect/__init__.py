"""Machine code: SASS and x86 taken apart, held against the model."""
