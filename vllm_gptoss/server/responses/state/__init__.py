"""State that outlives a request. In: finished responses, events, items. Out: the same, for their owner only.

`store` is the database (`tables`, `database`): `stored` responses, `event_store` for background ones,
`conversation_store` and `conversation_hold` for conversations. `previous` finds the items before a request, `sealing`
encrypts data that clients store, `caller` identifies the client.
"""
