"""The ledger in Postgres; the only package that imports sqlalchemy."""
