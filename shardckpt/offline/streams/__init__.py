"""Operations on the versions of a stream."""
