"""The SM100 GEMMs at the shapes of DeepSeek-V4: modelled and emulated anywhere, measured on a B200."""
