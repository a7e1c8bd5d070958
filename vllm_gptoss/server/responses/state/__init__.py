"""What outlives a request. In: finished responses, events, items. Out: the same, for their owner only.

`store` is the database (`tables`, `database`): `stored` responses, `event_store` for background ones,
`conversation_store` and `conversation_hold` for conversations. `previous` finds what came before a request, `sealing`
encrypts what clients carry for us, `caller` says who asks.
"""
