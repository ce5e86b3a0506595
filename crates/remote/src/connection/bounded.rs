//! Bodies that the library collects in memory: of refusals, listings, credentials and answers to writes. An object's bytes
//! are a stream, whose readers count them.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame};
use object_store::client::{HttpError, HttpErrorKind, HttpResponse, HttpResponseBody};

/// Of a refusal: the library's messages repeat it, ours do not.
const MOST_REFUSAL_BYTES: usize = 64 << 10;
/// Of any other answer. The longest page of a listing is Azure's: 5,000 names of 1,024 characters each, escaped, with as
/// much about each of them.
const MOST_ANSWER_BYTES: usize = 64 << 20;

/// An answer other than an object is longer than any that a store has reason to send.
#[derive(Debug)]
pub(crate) struct TooLong;

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the answer is too long")
    }
}

impl Error for TooLong {}

/// Bounds the body of an answer, unless it is an object's. A refusal is cut, since its status says enough; any other answer
/// that is too long is an error.
pub(super) fn bounded(answer: HttpResponse, is_object: bool) -> HttpResponse {
    let is_refusal = !answer.status().is_success();
    if is_object && !is_refusal {
        return answer;
    }
    let left_bytes = if is_refusal { MOST_REFUSAL_BYTES } else { MOST_ANSWER_BYTES };
    answer.map(|body| HttpResponseBody::new(Bounded { body: Some(body), left_bytes, is_refusal }))
}

struct Bounded {
    /// None behind the end. Dropped there, which ends the connection.
    body: Option<HttpResponseBody>,
    left_bytes: usize,
    is_refusal: bool,
}

/// Without the length that the server announces: the default tells none, and the library allocates what it is told.
impl Body for Bounded {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        loop {
            let Some(body) = &mut self.body else { return Poll::Ready(None) };
            let piece = match std::task::ready!(Pin::new(body).poll_frame(context)) {
                // Trailers are left out.
                Some(Ok(frame)) => frame.into_data(),
                other => return Poll::Ready(other),
            };
            let Ok(mut piece) = piece else { continue };
            if piece.len() > self.left_bytes {
                self.body = None;
                if !self.is_refusal {
                    let error = HttpError::new(HttpErrorKind::Decode, TooLong);
                    return Poll::Ready(Some(Err(error)));
                }
                piece.truncate(self.left_bytes);
            }
            self.left_bytes -= piece.len();
            if self.is_refusal {
                // The library fails without the status if the text is no UTF-8, and a cut may be inside of a character.
                let plain = |byte: &u8| if byte.is_ascii() { *byte } else { b'?' };
                piece = piece.iter().map(plain).collect();
            }
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
    }
}
