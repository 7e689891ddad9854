"""Names, cities and goods of the task; the test set's values are disjoint from training's."""

from .words import listed

TRAIN_GIVEN = listed(
    "Adrian Agnes Alberto Alina Amelia Andre Angela Anton Astrid Aurora Barbara Bastian Beatrice "
    "Bernard Bianca Camille Carmen Cecilia Cedric Charlotte Chiara Christoph Claudia Conrad "
    "Cordelia Cyril Dagmar Daniel Daphne Delia Denise Dmitri Dominic Edith Edgar Eduardo Elena "
    "Elias Eloise Elsa Enrique Erik Esther Fabian Farid Felicity Felix Fernanda Flora Florian "
    "Francesca Gabriel Gemma Gerard Gloria Gregor Greta Gustav Hana Harald Hassan Hector Helga "
    "Hugo Ibrahim Ida Ignacio Ines Ingrid Irena Isabel Ismail Jakob Jasmin Joanna Joaquin Johan "
    "Josefine Judith Julian Kamal Karin Kenji Klara Klaus Lars Leila Lena Leonard Linda Lorenzo "
    "Lucia Ludwig Magnus Malik Manuel Marcus Margaret Marta Matthias Mehmet Melissa Mikael Miriam "
    "Monica Nadia Naomi Natalia Niklas Noel Olga Oliver Omar Pablo Patricia Pavel Pedro Petra "
    "Philip Rachel Rafael Ramona Raymond Regina Ricardo Rita Roland Rosalind Rufus Sabine Samira "
    "Sebastian Selma Silvia Simon Sofia Stefan Stella Susanne Sven Tamara Tariq Teresa Tobias "
    "Ulrich Ursula Valentina Vincent Viola Vivian Werner Wilhelm Yolanda Yusuf Zora"
)
TRAIN_SURNAMES = listed(
    "Abbott Acosta Adler Aguilar Alvarez Andersson Arnold Bachmann Baldwin Barnes Barros Bauer "
    "Becker Benitez Bennett Berger Bergstrom Bianchi Blanchard Blom Bondar Brandt Braun Brennan "
    "Briggs Brooks Burke Cabrera Calloway Campbell Castillo Chandler Chavez Christensen Coleman "
    "Collins Conti Correia Cortez Crawford Dalton Dawson Delgado Diaz Dietrich Donovan Dubois "
    "Dvorak Eriksen Esposito Fabre Farrell Ferrari Fletcher Fontaine Forster Foster Franklin "
    "Friedrich Fuentes Gallagher Garcia Gibson Giordano Graham Grant Gruber Guerrero Hansen "
    "Harper Harrison Hartmann Hayes Heller Henderson Herrera Hoffmann Holm Horvat Howard Hughes "
    "Ivanov Jansen Jensen Jimenez Johansson Kaplan Kaufmann Keller Kelly Kennedy Khan Kim "
    "Kowalski Kramer Kruger Lambert Larsson Lawson Leclerc Lehmann Lindgren Lombardi Lopez Lorenz "
    "Madsen Maier Marchetti Marino Martin Martinez Mason Mendes Mercier Meyer Mitchell Molina "
    "Moreau Morgan Moretti Morris Murphy Nakamura Navarro Nguyen Nielsen Novak Nowak Olsen Ortega "
    "Osborne Palmer Pereira Petersen Petrov Powell Quinn Ramirez Reyes Richter Rivera Roberts "
    "Romano Rossi Rossini Russell Sanchez Santos Schmidt Schneider Schulz Serrano Sharma Silva "
    "Simmons Singh Sokolov Sorensen Spencer Suzuki Svensson Takahashi Thompson Torres Vargas "
    "Vasquez Vogel Wagner Watson Weber Werner Wheeler Winkler Yamada Zimmermann"
)
TRAIN_CITIES = listed(
    "Aachen Aarhus Adelaide Amsterdam Ankara Antwerp Athlone Atlanta Auckland Baltimore Bamberg "
    "Barcelona Basel Belfast Belgrade Bergen Bilbao Bologna Bordeaux Bremen Brighton Brisbane "
    "Bruges Brussels Bucharest Budapest Calgary Cambridge Canberra Cardiff Chicago Cologne "
    "Copenhagen Cork Dallas Delft Denver Detroit Dortmund Dresden Edinburgh Florence Frankfurt "
    "Freiburg Galway Gdansk Geneva Genoa Ghent Glasgow Gothenburg Granada Graz Haarlem Hamburg "
    "Hanover Heidelberg Helsinki Houston Innsbruck Istanbul Jakarta Kingston Krakow Lagos "
    "Lausanne Leeds Leipzig Lille Limerick Linz Lisbon Liverpool Lucerne Lyon Madrid Malaga "
    "Malmo Manchester Marseille Melbourne Memphis Miami Montreal Munich Nairobi Nantes Naples "
    "Nottingham Nuremberg Odense Orlando Osaka Oslo Ottawa Oxford Padua Palermo Perth Pittsburgh "
    "Porto Portland Prague Quebec Reykjavik Riga Rotterdam Salzburg Seattle Seville Sheffield "
    "Singapore Southampton Stockholm Strasbourg Stuttgart Tallinn Tampere Toledo Toronto "
    "Toulouse Trieste Turin Uppsala Utrecht Valencia Vancouver Verona Vienna Warsaw Zagreb"
)
TRAIN_CITIES += ["New Orleans", "San Diego", "Cape Town", "Las Vegas", "Port Louis", "Santa Fe"]
TRAIN_GOODS = listed(
    "lamp chair table cup plate bowl spoon candle mirror clock carpet blanket pillow curtain "
    "cabinet stool bench bottle jug mug kettle tray hammer saw drill ladder bucket rake hose "
    "fence gate door window tile pipe pump tyre helmet scarf coat jacket shirt sweater boot belt "
    "suitcase wallet umbrella ring watch bracelet notebook pencil ruler stamp map camera radio "
    "cable battery printer keyboard phone racket kite puzzle drum guitar violin melon pumpkin "
    "cake cheese tent stove compass canoe anchor lens filter valve cushion poster button"
)

TEST_GIVEN = listed(
    "Alessia Amir Benedikt Brigitte Callum Caterina Damian Dolores Eleanor Emmanuel Fatima "
    "Ferdinand Georgina Gianni Hedwig Hendrik Imogen Ingmar Jocelyn Jorge Katarina Khalid Lorena "
    "Luther Mateo Mathilde Milena Nathaniel Nikolai Odette Olaf Penelope Quentin Renata Roderick "
    "Saskia Severin Tatiana Thaddeus Umberto Verena Vladimir Winifred Xavier Yasmin Zacharias"
)
TEST_SURNAMES = listed(
    "Albrecht Almeida Babic Beaumont Bjork Cavendish Chowdhury Costa Dahl Demir Eastwood Engel "
    "Faulkner Fischer Galloway Gonzalez Haddad Hawkins Ibsen Ishikawa Jankovic Jovanovic "
    "Karlsson Kimura Lachance Lindholm Macdonald Mancini Nakagawa Norris Okafor Oliveira Papadakis "
    "Pellegrini Quintero Rasmussen Rutherford Salvatore Stanley Tanaka Thornton Underwood Urbano "
    "Vandenberg Villanueva Whitaker Wolff Yilmaz Zeller Ziegler"
)
TEST_CITIES = listed(
    "Alicante Arnhem Augsburg Bristol Bratislava Catania Coimbra Coventry Darmstadt Dundee "
    "Eindhoven Erfurt Figueira Fukuoka Groningen Hobart Jena Kassel Kyoto Leicester Ljubljana "
    "Mannheim Montpellier Minneapolis Nagoya Newcastle Parma Phoenix Plymouth Potsdam "
    "Regensburg Rostock Sacramento Sarajevo Swansea Tbilisi Tromso Vilnius Wellington Yerevan"
)
TEST_CITIES += ["New Haven", "San Antonio", "Santa Monica", "Port Elizabeth"]
TEST_GOODS = listed(
    "vase basket broom shovel wheel bicycle glove shoe bag purse necklace pen globe speaker "
    "charger tablet doll flute piano pear loaf sausage lantern paddle magnet spring kit crate"
)

MODIFIERS = listed(
    "red blue green yellow black white grey brown small large round square old new used wooden "
    "metal steel copper brass silver glass plastic leather cotton wool linen silk oak walnut "
    "garden kitchen office travel folding striped painted polished electric antique"
)
