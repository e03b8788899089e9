"""HTTP tools on Litestar and uvicorn. They know tokens and parameters, and no door."""
